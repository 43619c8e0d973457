"""How training processes are started, heard and ended."""
