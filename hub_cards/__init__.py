"""
Model cards and uploads: what a checkpoint says about itself, from its own files.

    from modeling_looped.hub_cards import push, write_card

    write_card("demo-output", license="apache-2.0")
    push("demo-output", "me/my-looped-gpt")
"""
