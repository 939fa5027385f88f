"""What Sphinx is given beside its own extensions: see each file. `conf.py` lists them."""
