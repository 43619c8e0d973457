"""Who trains: ranks, generations, sizes."""
