"""Which real cluster do tests run on, and how do they follow pods and jobs there?"""
