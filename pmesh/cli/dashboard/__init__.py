"""`pmesh dashboard`: the mesh in a browser, on a page that people leave open.

A program of its own asks the agent, as `pmesh metrics` does. So the agent serves no HTTP, and what
goes wrong here can't reach it.
"""
