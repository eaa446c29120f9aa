"""Other programs' layouts: read a mapper that another program fitted, and write one that another program reads."""
