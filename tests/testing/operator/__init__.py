"""What does a part of the operator say by itself: coordinator, port for readers, metrics?"""
