"""What ECRL's study has published: means over its eight suites, one seed, CIFAR, ResNets of full width.

The numbers are of its own hardware. They stand beside ours to compare ratios, and never absolute times.
"""

GOODPUT = {"ref": 10.9284, "blk": 9.4560, "ovl": 9.6433}
"""committed logical steps a second"""
WALL = {"ref": 157.1323, "blk": 181.3431, "ovl": 177.7858}
STALL = {"ref": 18.0629, "blk": 18.0859, "ovl": 7.8654}
WRITE = {"ref": 17.8939, "blk": 17.9036, "ovl": 1.3811}
SNAPSHOT = {"ref": 0.0295, "blk": 0.0324, "ovl": 0.0328}
RESTARTS = {"ref": 0, "blk": 2, "ovl": 2}
LOSS_DIFFERENCE = {"blk": 0.0660, "ovl": 0.0669}
GAIN, LEAST_GAIN, MOST_GAIN = 1.9931, 0.2358, 3.6527
"""of overlapped over blocking, in per cent: mean over the suites, least, most"""
DROP = {"blk": -13.2466, "ovl": -11.5026}
"""of goodput against the reference, in per cent"""
STALL_CUT, WRITE_CUT = 56.5, 92.3
"""by how many per cent overlapped saves have less of it than blocking ones"""
