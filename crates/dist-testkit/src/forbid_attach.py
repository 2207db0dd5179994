# Forbids to read or write other processes' memory, as a container's profile does, and goes on as another program.
#
# usage: forbid_attach.py read,write PROGRAM ARGUMENTS...
import ctypes, os, sys
class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]
machine = os.uname().machine
numbers = {"x86_64": {"read": 310, "write": 311}, "aarch64": {"read": 270, "write": 271}}[machine]
steps = [(0x20, 0, 0, 0)]
for name in sys.argv[1].split(","):
    steps += [(0x15, 0, 1, numbers[name]), (0x06, 0, 0, 0x00050001)]
steps += [(0x06, 0, 0, 0x7FFF0000)]
filter = (Instruction * len(steps))(*[Instruction(*step) for step in steps])
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(len(steps), filter)), 0, 0) == 0
os.execvp(sys.argv[2], sys.argv[2:])
