"""From rows to conclusions: tables, figures, the ledger of claims, the HTML report. Needs no model."""
