"""Random numbers by what is computed: PL450 to PL454."""

from __future__ import annotations

from paceline.codes.page import Page

PAGES: dict[str, Page] = {
    "PL450": Page(
        title="A module draws random numbers that depend on the layout",
        why=(
            "Masks of nn.Dropout and its kin, of F.dropout and of dropout in attention are drawn by (seed, "
            "step, sample, module, position), so every layout has the same. Any other draw in a forward "
            "(torch.rand, bernoulli, stochastic depth, gumbel_softmax, RReLU) comes from the rank's "
            "generator. That is seeded before every microbatch, so data-parallel ranks agree; another "
            "microbatch_size gives other numbers, and under tp or sequence a rank can't know which elements "
            "of the whole tensor it draws for."
        ),
        fix=(
            "Express the draw with dropout where it is one: stochastic depth of probability p is "
            "x * F.dropout(torch.ones(batch, 1, 1), p). Otherwise turn it off, or keep to layouts with tp=1, "
            "sequence=false and one microbatch_size."
        ),
    ),
    "PL451": Page(
        title="Dropout of a tensor without a dimension of samples",
        why=(
            "A mask is drawn per sample, so Paceline looks for the samples: dimension 0 or 1 as long as the "
            "microbatch, or dimension 0 a multiple of it. Here neither is, and one mask that depends on the "
            "microbatch's first sample serves for all: with another microbatch_size it is another one."
        ),
        fix=(
            "Expand the tensor to [samples, ...] before it is dropped (positions that are dropped before "
            "they are added to the tokens, for example), or set that dropout to 0."
        ),
    ),
    "PL452": Page(
        title="Dropout inside a recurrent kernel",
        why=(
            "nn.LSTM, nn.GRU and nn.RNN with dropout between layers draw within one call, from the rank's "
            "generator, where no mask can be given."
        ),
        fix="Stack nn.LSTM of one layer each with nn.Dropout between them, or set dropout=0.",
    ),
    "PL453": Page(
        title="A forward draws from a generator, and where is not to be seen",
        why=(
            "After a forward, the state of Python's random, of numpy's or (without one of its operations) of "
            "torch's generator is another one. All are seeded before every microbatch, so data-parallel "
            "ranks agree, but a draw for a whole microbatch changes with its size, and ranks that share one "
            "must draw the same."
        ),
        fix=(
            "Draw in the data set's __getitem__, where numbers depend on (seed, epoch, sample) alone; of a "
            "kernel with dropout of its own (flash-attn), turn that off or take torch's attention."
        ),
    ),
    "PL454": Page(
        title="An attention of your own that drops by itself",
        why=(
            "Another function has taken the place of F.scaled_dot_product_attention. Paceline calls it as it "
            "is. Where it is called with dropout_p above 0, it draws from the rank's generator: masks depend "
            "on the microbatch's size, and ranks of tp may draw the same mask for different heads."
        ),
        fix=(
            "Call it with dropout_p=0, or drop what it gives with nn.Dropout, whose masks are the same under "
            "every layout."
        ),
    ),
}
