"""What a tutorial needs of the library of this name."""
