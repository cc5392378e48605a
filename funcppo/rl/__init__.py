"""How is a policy trained on an environment by its name, with published settings and several seeds?"""
