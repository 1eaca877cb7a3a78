"""Entry: ``python -m pods_jax.compare`` measures what PODS saves over its baselines, on the user's own hardware.

    arms.py      which runs are compared, and how each changes the configuration
    running.py   the arms side by side: step k of each in turn, from one checkpoint, over the same prompts
    curves.py    from run folders to accuracy over time, times to a level, and ratios
    tables.py    those as rows, for the terminal and for the page
    pages.py     one HTML page

Every arm and seed is a run folder of its own, ``<compare.out>/<arm>/seed<s>``, so the page can be written from the folders
alone and a comparison that was killed continues.
"""
