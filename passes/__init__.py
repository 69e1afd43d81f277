"""A folder for each stage of compilation, and a file for each pass. `fp8pass/lowering/order.py` orders them."""
