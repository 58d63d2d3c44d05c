"""The paper's theorems: what they prescribe, and what is measured of them."""
