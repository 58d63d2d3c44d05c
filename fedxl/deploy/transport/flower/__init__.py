"""Flower as the transport: an app for anybody's federation, by Flower's public interface alone.

Sites trust the server: whoever may start runs at SuperLink can run any code at every site. They also trust each
other: nodes show fedxl no keys, so an approved site could take another one's name. The default transport needs
neither. The files of `project.py` put nginx in front of SuperLink and at each site, so that nobody else gets in.
"""
