"""How do operators, kubelets and agents live together, in virtual time, through any fault?"""
