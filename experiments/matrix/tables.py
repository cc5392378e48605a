def whole(r):
    return ""


def rewrite(a, b):
    pass
