"""An extension of hasten in an installed package; `extension.py` declares what it offers."""
