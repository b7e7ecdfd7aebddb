"""Between text and token ids: tokenizers, chat templates, incremental detokenisation.

May import ``errors`` and nothing else of the project. ``tokenizers`` and ``jinja2`` (extra ``text``) are loaded by the
first model that needs them; the tokenizer of the model ``echo`` needs neither. Start reading at ``tokenizer.py``.
"""
