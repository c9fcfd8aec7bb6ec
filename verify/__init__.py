"""Certificates: rules that machine code is held to, read off PTX and SASS; never at run time."""
