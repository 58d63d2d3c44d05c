"""The experiments of the FeDXL paper (Guo, Jin, Luo, Yang. ICML 2023, section 4 and appendix), one command each."""
