"""What must hold while the product is rebuilt, recorded once and compared by tests.

`python -m tests.golden.record [NAME...]` writes the recordings. A recording that changes on purpose
changes in the commit that says why.
"""
