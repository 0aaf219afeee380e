"""Tile sizes: a static table by kernel, architecture, element size and number of rows.

Nothing is timed at run time unless BWSFT_AUTOTUNE=1, which times the candidates for every new key
once and prints the winner as a line for TABLE. What the table holds compiles without spilling a
register for sm_80 and sm_90; tests/test_compile_offline.py checks each entry.
"""
