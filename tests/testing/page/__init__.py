"""Read pages with a browser or a parser."""
