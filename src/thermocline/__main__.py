"""`python -m thermocline`."""

from thermocline.cli.main import main

main()
