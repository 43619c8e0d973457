"""Turn text and records into token sequences that are addressed by global sample position.

Write, once per machine and text:

    open_data             dataset.py                one entry for every format of data
    TextSources.open      prepared/text_sources.py  find the sources and the tokenizer
    build                 prepared/build.py         encode blocks in worker processes and publish the folder
    FileSource.read       sources/resolve.py        parse a block of a file into documents or records
    encode_block          tokens/encoding.py        tokenize documents; examples/encoding.py does so with records
    ShardWriter.add       prepared/shard_writer.py  append to an Arrow file

Read, each step:

    Loader.read_batch     loader.py                 prepare steps ahead, convert samples to tensors
    Samples.read_at       batches/samples.py        from a position to a source and a sample of it (batches/order.py)
    PreparedData.read     prepared/reader.py        a range of tokens of the memory-mapped folder

With `data.tokenization` Online, `online` takes the place of both: each row of a batch is a stream, which worker
processes tokenize block by block in the same way.
"""
