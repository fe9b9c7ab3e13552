"""Pure formulas: arrays in, arrays out.

Axes used throughout: B rows (completions), T completion tokens, V vocabulary, G completions of one prompt (a group).
"""
