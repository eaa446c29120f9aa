"""Other programs' layouts: reading a mapper that another program fitted, and writing one that it reads."""
