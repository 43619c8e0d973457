"""How processes of containers are started in their isolation, and found again."""
