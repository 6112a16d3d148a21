"""Campaigns: long runs that search for a crash, a failed call or a missing test that breaks a promise.

`python -m lastgood_lab.campaigns.NAME` runs one from a source checkout; its report is written into lab/reports/.
"""
