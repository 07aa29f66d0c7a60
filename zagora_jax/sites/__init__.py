"""Sites: runs on machines joined by slow links, which exchange compressed outer updates through a folder.

`site` is what the trainer talks to; `rounds` is how sites agree; `outer` is the mathematics, `updates` the files,
`folder` the storage, `agreement` what all sites must have in common.
"""
