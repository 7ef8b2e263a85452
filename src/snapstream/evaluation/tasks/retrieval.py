"""Retrieval task: facts hidden in a long text, asked for at its end.

A document is a run of English-like filler sentences.  At chosen depths it hides *facts* such as ``Note for falcon:
amber river.``  A question, ``Recall the note for falcon:``, ends with the very key token that precedes the answer in
the document; the right continuation is ``amber river.``

Everything is drawn from ``random.Random(seed)``: a document is a pure function of its arguments.  Keys and first value
words never occur in filler, second value words do.  Keys and first value words are unique within a document.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

PAD_TOKEN, EOS_TOKEN, UNK_TOKEN = "<pad>", "<eos>", "<unk>"
END = "."


def _words(text: str, suffix: str = "") -> tuple[str, ...]:
    """Splits a block of words."""
    return tuple(word + suffix for word in text.split())


KEYS: tuple[str, ...] = _words(
    """falcon otter badger heron lynx walrus beaver raven osprey ferret gopher bison moose elk caribou puffin pelican
    condor vulture eagle hawk kestrel merlin swift swallow martin thrush robin wren finch sparrow starling magpie
    jackdaw rook crow jay cuckoo plover curlew snipe godwit avocet stork ibis egret crane swan goose mallard teal
    pintail grebe loon gannet cormorant petrel albatross tern gull skua auk razorbill quail pheasant grouse
    partridge turkey peacock pigeon dove parrot macaw cockatoo toucan hornbill kingfisher hoopoe oriole tanager
    cardinal bunting warbler nuthatch treecreeper dipper wagtail pipit lark shrike waxwing marten stoat weasel mink
    polecat wolverine skunk raccoon coati panda bear wolf fox jackal coyote dingo hyena cheetah leopard jaguar
    cougar ocelot serval caracal tiger lion civet genet mongoose meerkat seal narwhal dolphin porpoise orca whale
    manatee dugong hare rabbit pika squirrel chipmunk marmot dormouse hamster lemming vole rat porcupine chinchilla
    capybara agouti sloth armadillo anteater aardvark pangolin hedgehog shrew mole bat lemur loris gibbon baboon
    mandrill gorilla chimp tapir rhino zebra horse donkey mule camel llama alpaca vicuna giraffe okapi deer reindeer
    antelope gazelle impala kudu eland oryx gnu buffalo yak goat ibex chamois sheep mouflon boar peccary hippo
    elephant kangaroo wallaby wombat koala possum quokka platypus echidna turtle tortoise terrapin gecko iguana
    chameleon skink monitor cobra viper python adder boa mamba frog toad newt salamander axolotl salmon trout pike
    perch carp tench bream roach eel sturgeon cod haddock herring mackerel tuna marlin swordfish halibut""",
    suffix=":",
)
ADJECTIVES: tuple[str, ...] = _words(
    """amber azure beige black blue bronze brown coral cream crimson cyan ebony emerald golden green grey indigo ivory
    jade khaki lavender lilac magenta maroon mauve ochre olive orange pink purple red ruby russet sapphire scarlet
    sepia silver taupe turquoise umber vermilion violet white yellow brass copper cotton crystal glass granite iron
    leaden leather linen marble nylon paper pewter plastic porcelain rubber satin silken slate steel stone straw
    velvet waxen wooden woollen zinc ancient antique modern medieval roman greek persian nordic arctic tropical
    alpine coastal northern southern eastern western lunar solar stellar cosmic bitter salty sour spicy sugary sweet
    savoury buttery creamy crunchy juicy smoky tangy zesty angular broad circular conical crooked curved flat hollow
    jagged narrow oblong oval pointed round slanted slender spiral square twisted triangular wavy wide chilly frosty
    frozen humid icy lukewarm mild misty rainy snowy stormy sunny tepid warm windy boisterous hushed muffled noisy
    raucous shrill silent thunderous bashful brave clever curious daring eager fearless gentle grumpy humble jolly
    kindly lively merry nimble noble patient playful proud shy sleepy solemn stubborn timid witty zealous bent
    brittle bumpy coarse cracked dusty feathery fluffy fuzzy glossy gritty knotted mossy muddy polished prickly
    ragged rough rusty scaly shiny slippery smooth soft spongy sticky velvety wrinkled colossal compact giant huge
    immense massive minute petite tiny towering vast double single triple sevenfold weekly monthly yearly hourly
    daily secret public private royal rural urban foreign local"""
)
NOUNS: tuple[str, ...] = _words(
    """river lantern bridge garden window mountain ladder harbour candle basket mirror tower kettle compass feather
    button blanket hammer barrel anchor bottle bucket carpet castle cellar chair chimney clock cloud coat coin
    corner cottage cradle crown cup curtain desk door drawer drum engine envelope farm fence ferry field fire flag
    floor flute forest fountain gate glove hat hill house island jacket jar jug kitchen kite knife lake lamp letter
    library lighthouse lock map market meadow medal mill mine mug needle nest notebook oar orchard oven page paint
    palace parcel path pen pencil piano picture pillow pipe plate pocket pond pot puzzle quilt radio railway ribbon
    ring road roof room rope saddle sail saw scarf school shelf ship shirt shoe shop shovel sign sledge spoon stable
    staircase stamp station statue stove street string suitcase table tent theatre thread ticket tile tool torch
    town toy train tray trunk tunnel umbrella valley van vase village violin wagon wall watch well wheel whistle"""
)
_SLOTS: dict[str, Sequence[str]] = {
    "ADJ": _words(
        """old new quiet small large bright dark distant empty crowded familiar strange simple plain heavy light broken
        painted hidden open"""
    ),
    "ADV": _words(
        "slowly quickly calmly often again later early together alone today yesterday quietly carefully gladly"
    ),
    "DO": _words(
        """saw found carried moved repaired cleaned watched described sold bought measured passed opened closed admired
        ignored borrowed returned visited remembered covered followed"""
    ),
    "NOUN": NOUNS,
    "PLACE": _words("near behind beside under above across from beyond inside outside"),
    "REST": _words("waited rested stayed slept stood remained paused turned listened smiled"),
    "TIME": _words("morning evening spring winter summer autumn night afternoon"),
    "WHO": _words(
        """baker teacher sailor farmer doctor singer painter writer student keeper gardener driver miller tailor
        captain traveller neighbour child woman man shepherd clerk porter guard"""
    ),
}
_TEMPLATES = """
    The WHO REST . The NOUN REST . The WHO REST ADV . The ADJ NOUN REST . The WHO DO the NOUN . A ADJ WHO REST ADV .
    The WHO ADV DO the NOUN . A WHO DO the ADJ NOUN . The WHO REST PLACE the ADJ NOUN .
    In the TIME the WHO REST ADV . The ADJ WHO DO the ADJ NOUN ADV . In the TIME a WHO DO the NOUN .
    The WHO DO the NOUN PLACE the ADJ NOUN . In the TIME the WHO DO the ADJ NOUN .
    The WHO and the WHO DO the NOUN ADV . The ADJ WHO DO the NOUN PLACE the ADJ NOUN .
    In the TIME the ADJ WHO DO the ADJ NOUN . The WHO DO the NOUN and the WHO DO the NOUN .
    The WHO DO the NOUN while the WHO REST PLACE the NOUN . The ADJ WHO DO the ADJ NOUN PLACE the ADJ NOUN ADV .
"""
_SENTENCES: dict[int, list[list[str]]] = {}
for _line in _TEMPLATES.split(END)[:-1]:
    _template = [*_line.split(), END]
    _SENTENCES.setdefault(len(_template), []).append(_template)
_SHORTEST, _LONGEST = min(_SENTENCES), max(_SENTENCES)

_HEADER = ("Here", "begins", "the", "notebook", END)
_FACT, _QUESTION = ("Note", "for"), ("Recall", "the", "note", "for")
FACT_TOKENS, QUESTION_TOKENS = len(_FACT) + 4, len(_QUESTION) + 1


@dataclass(frozen=True, slots=True)
class Fact:
    """One hidden fact.

    Attributes:
        key: The key token that introduces the fact and ends its question, such as ``falcon:``.
        answer: The value words, without the closing full stop.
        position: Token index of the first value word in the document.
        depth: ``position`` as a fraction of the document's length.
    """

    key: str
    answer: tuple[str, ...]
    position: int
    depth: float


@dataclass(frozen=True, slots=True)
class Document:
    """A text with hidden facts.

    Attributes:
        words: The document as tokens of the word-level tokenizer.
        facts: The hidden facts in the order in which they occur.
        seed: The seed that the document was drawn from.
    """

    words: tuple[str, ...]
    facts: tuple[Fact, ...]
    seed: int

    @property
    def text(self) -> str:
        """The document as readable text."""
        return detokenize(self.words)

    def fact(self, key: str) -> Fact:
        """Returns the fact that ``key`` introduces; raises KeyError if there is none."""
        return {fact.key: fact for fact in self.facts}[key]

    def question(self, key: str) -> str:
        """Returns the text to append to the document (or to an answer) to ask for ``key``."""
        return " " + detokenize(question_words(self.fact(key).key))

    def prompt(self, key: str) -> str:
        """Returns the document followed by the question for ``key``."""
        return self.text + self.question(key)

    def answer(self, key: str) -> str:
        """Returns the right continuation of ``prompt(key)``, such as ``amber river.``."""
        return detokenize((*self.fact(key).answer, END))


def detokenize(words: Sequence[str]) -> str:
    """Joins tokens into readable text: single spaces, full stops attached to the word before."""
    return " ".join(words).replace(" " + END, END)


def question_words(key: str) -> tuple[str, ...]:
    """Returns the tokens of the question for ``key``; the last of them is ``key`` itself."""
    return (*_QUESTION, key)


def fact_words(key: str, answer: Sequence[str]) -> tuple[str, ...]:
    """Returns the tokens of the sentence that states a fact."""
    return (*_FACT, key, *answer, END)


def vocabulary() -> tuple[str, ...]:
    """Returns every token of the task in a fixed order, special tokens first."""
    words = [PAD_TOKEN, EOS_TOKEN, UNK_TOKEN, END, *_HEADER, *_FACT, *_QUESTION, *KEYS, *ADJECTIVES, *NOUNS]
    words += [word for word in _TEMPLATES.split() if word not in _SLOTS]
    words += [word for slot in _SLOTS.values() for word in slot]
    return tuple(dict.fromkeys(words))


def max_facts(num_tokens: int) -> int:
    """Returns how many facts fit into a document of ``num_tokens`` tokens."""
    room = (num_tokens - len(_HEADER) - _SHORTEST) // FACT_TOKENS
    return max(0, min(room, len(KEYS), len(ADJECTIVES)))


def make_document(
    num_tokens: int, num_facts: int = 1, seed: int = 0, *, depths: Sequence[float] | None = None
) -> Document:
    """Draws a document of exactly ``num_tokens`` tokens that hides ``num_facts`` facts.

    Args:
        num_tokens: Length of the document, without any question.
        num_facts: How many facts it hides.
        seed: Seed of the random generator; equal arguments give equal documents.
        depths: Where the facts go, one fraction of the document's length each: 0 is the beginning, 1 the end.  A
            fact goes to the sentence boundary nearest to its depth.  Drawn uniformly by default.

    Raises:
        ValueError: If the facts do not fit or ``depths`` does not match ``num_facts``.
    """
    if num_tokens < len(_HEADER) + _SHORTEST or not 0 <= num_facts <= max_facts(num_tokens):
        raise ValueError(f"{num_facts} facts do not fit into {num_tokens} tokens")
    if depths is not None and (len(depths) != num_facts or not all(0.0 <= depth <= 1.0 for depth in depths)):
        raise ValueError(f"expected {num_facts} depths between 0 and 1, got {depths}")
    rng = random.Random(seed)
    keys = rng.sample(KEYS, num_facts)
    firsts = rng.sample(ADJECTIVES, num_facts)
    answers = [(first, rng.choice(NOUNS)) for first in firsts]
    chosen = [rng.random() for _ in range(num_facts)] if depths is None else list(depths)
    order = sorted(range(num_facts), key=lambda index: chosen[index])

    filler = num_tokens - len(_HEADER) - num_facts * FACT_TOKENS
    words, facts = list(_HEADER), list[Fact]()
    for length in (*_sentence_lengths(rng, filler), 0):
        while len(facts) < num_facts:
            index = order[len(facts)]
            target = chosen[index] * num_tokens
            if length and len(words) + FACT_TOKENS / 2 + length / 2 < target:
                break
            position = len(words) + len(_FACT) + 1
            facts.append(Fact(keys[index], answers[index], position, position / num_tokens))
            words += fact_words(keys[index], answers[index])
        if length:
            words += _sentence(rng, length)
    return Document(tuple(words), tuple(facts), seed)


def _sentence_lengths(rng: random.Random, total: int) -> list[int]:
    """Splits ``total`` tokens into lengths for which there are sentence templates."""
    lengths: list[int] = []
    while total:
        length = total if total <= _LONGEST else min(rng.randint(_SHORTEST, _LONGEST), total - _SHORTEST)
        lengths.append(length)
        total -= length
    return lengths


def _sentence(rng: random.Random, length: int) -> list[str]:
    """Draws a filler sentence of exactly ``length`` tokens."""
    template = rng.choice(_SENTENCES[length])
    return [rng.choice(_SLOTS[word]) if word in _SLOTS else word for word in template]
