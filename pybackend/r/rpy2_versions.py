"""Versions of rpy2 for older versions of R."""

# Newer versions call R_getVar, which exists since R 4.5. The extra `r44` of tfdist installs these.
FOR_R_BEFORE_45 = ("rpy2-rinterface==3.6.5", "rpy2-robjects==3.6.4")
ADVICE = f"for R before 4.5 with {' and '.join(FOR_R_BEFORE_45)}"
