"""The words that generated tasks are made of, and English-like filler sentences made of them.

Animals name what can be asked for and adjectives begin its value: neither occurs in filler. Nouns end a value and do
occur in filler, so that a value cannot be guessed from its kind of word alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

END = "."


def words(text: str) -> tuple[str, ...]:
    """Splits a block of words."""
    return tuple(text.split())


ANIMALS: tuple[str, ...] = words(
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
    perch carp tench bream roach eel sturgeon cod haddock herring mackerel tuna marlin swordfish halibut"""
)
ADJECTIVES: tuple[str, ...] = words(
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
NOUNS: tuple[str, ...] = words(
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
PEOPLE: tuple[str, ...] = words(
    """baker teacher sailor farmer doctor singer painter writer student keeper gardener driver miller tailor captain
    traveller neighbour child woman man shepherd clerk porter guard"""
)
_SLOTS: dict[str, Sequence[str]] = {
    "ADJ": words(
        """old new quiet small large bright dark distant empty crowded familiar strange simple plain heavy light broken
        painted hidden open"""
    ),
    "ADV": words(
        "slowly quickly calmly often again later early together alone today yesterday quietly carefully gladly"
    ),
    "DO": words(
        """saw found carried moved repaired cleaned watched described sold bought measured passed opened closed admired
        ignored borrowed returned visited remembered covered followed"""
    ),
    "NOUN": NOUNS,
    "PLACE": words("near behind beside under above across from beyond inside outside"),
    "REST": words("waited rested stayed slept stood remained paused turned listened smiled"),
    "TIME": words("morning evening spring winter summer autumn night afternoon"),
    "WHO": PEOPLE,
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

FILLER_WORDS: tuple[str, ...] = tuple(
    dict.fromkeys(
        [word for word in _TEMPLATES.split() if word not in _SLOTS]
        + [word for slot in _SLOTS.values() for word in slot]
    )
)
"""Every word and full stop that filler is made of, in a fixed order."""


def filler(rng: random.Random) -> str:
    """Draws a filler sentence, as text that begins with a space."""
    template = rng.choice(_SENTENCES[rng.randint(_SHORTEST, _LONGEST)])
    drawn = [rng.choice(_SLOTS[word]) if word in _SLOTS else word for word in template]
    return " " + " ".join(drawn[:-1]) + END
