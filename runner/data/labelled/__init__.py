"""Texts and words with classes, prepared once: text-classification and token-classification."""
