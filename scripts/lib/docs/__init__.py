"""The pages in docs/: what is generated in them, their links, and the site made of them.

`python -m scripts.lib.docs` is `scripts/docs`. A page has a block between two comments for each
part that is generated from the code (`generate`). `links` checks all links as a code host reads
them. `site` builds the site with mkdocs-material, without network.
"""
