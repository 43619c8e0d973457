"""What does a browser, or a parser, make of a page?"""
