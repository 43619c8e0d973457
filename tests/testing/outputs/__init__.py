"""The outputs that pages show, made by the programs themselves from recorded or built jobs."""
