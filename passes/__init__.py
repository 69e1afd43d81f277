"""One file per pass. `fp8pass/pipeline.py` orders them."""
