"""What compression does to a training: three small models, each scheme, with feedback and without.

In the order of data: `models` are trained by `training` with each of `cases`; `results` keeps what
came out, `report` makes a table and a page of it, and `plot` a picture.
"""
