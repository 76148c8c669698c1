"""What works with other packages; each module imports the package that it is named after."""
