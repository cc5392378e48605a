from funcppo.cli import main

main()
