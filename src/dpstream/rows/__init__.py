"""From the batch of a source to rows of ids and values: parsing, types, hashing, rejecting.

`row_reader` is the way in; what becomes of a row depends on that row alone.
"""
