"""`python -m specbench`: the command `specbench`, see `specbench.cli`."""

from specbench.cli import main

main()
