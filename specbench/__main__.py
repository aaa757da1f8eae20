"""`python -m specbench`: the command `specbench`, see `specbench.config.commands`."""

from specbench.config.commands import main

main()
