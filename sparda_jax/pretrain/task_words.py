"""Words that recall tasks are made of, in a training and an evaluation part that share no word.

Nouns and adjectives are the frequent ones of WordNet 3.0 and some names of things; the split is by hash, one word in
ten for evaluation.
"""

import hashlib
from dataclasses import dataclass


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@dataclass(frozen=True, kw_only=True)
class WordLists:
    """The words of one split: nouns, adjectives, first names, surnames, cities."""

    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    first_names: tuple[str, ...]
    surnames: tuple[str, ...]
    cities: tuple[str, ...]


def is_eval_word(word: str) -> bool:
    """True for the tenth of all words that only evaluation uses."""
    return hashlib.sha256(word.lower().encode()).digest()[0] % 10 == 0


def word_lists(split: str) -> WordLists:
    """The words of a split.

    Args:
        split: `train` or `eval`.

    Raises:
        ValueError: another split.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split: {split!r} given, must be 'train' or 'eval'")

    def part(words: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(word for word in words if is_eval_word(word) == (split == "eval"))

    return WordLists(
        nouns=part(_NOUNS),
        adjectives=part(_ADJECTIVES),
        first_names=part(_FIRST_NAMES),
        surnames=part(_SURNAMES),
        cities=part(_CITIES),
    )


_NOUNS = _words("""
ability absence accident account ace acre action activity actor adam addition advantage adventure advice affair
afternoon age agency agent agreement air aircraft allotment amazement amount anaconda analysis anchor anger angle
animal anode antenna antibody anxiety apartment apparatus appeal appearance apple applicant approval apron arc
argument arm army arrow art article artillery artist aspect assignment assistance assumption assurance atmosphere atom
attention attitude audience author authority automobile avocado award awareness baby back background badge bag bakery
balance ball bamboo banana band banjo bank barn barrel baseball basement basis basket battery battle beach beacon beam
beauty bed bedroom bee beer beginning behavior belief bell bench bicycle bill bird biscuit bit blanket block blossom
board boat bond bone bonnet book boot bottle bottom box bracelet brain branch brand brass breakfast breath brick
bridge brigade broom brother brow bucket buffalo building bumblebee bunk business button cabin cactus cafeteria camera
camp campaign camping candidate candle canoe canteen canvas canyon cap capacity capital captain car caravan career
carpet carrot castle cat catcher category cathedral cattle cedar ceiling cell cello cent center century ceremony chain
chair champion chance chaos chapter character cheek cheer cherry chicken chimney chin chlorine choice cinnamon circle
citizen city clarinet clarity class cleaning cliff clock cloth clothes cloud clover club coach coast coat cobalt
coconut coffee collage collection college colonel color column comedy comet comfort command commander commission
committee community companion company comparison compass complement completion component composer comrade concept
conception conclusion concrete condition conference confidence conflict confusion congress conjugate connection
conscience contact content context continuity contrast conversion conviction copper copy coral core corner cost
cottage country county couple courage course court cow cradle crayon creation creature credit crew cricket crisis
crowd crystal culture cup curiosity current curtain curve cushion customer cypress daisy danger darkness data date
daughter dawn debate decade decision deduction defense definition degree density department depth desert desk detail
detergent device dialysis diameter diamond dictionary difference difficulty dignity dimension din dinner direction
director dirt discharge discovery discussion dish disk distance district division doctor doctrine dog dollar dolphin
donkey door dot doubt dozen dragon drama drawing dream drinking driver drum dust duty eagle ear earth earthquake easel
east economy edge editor education effect efficiency effluent effort egg elbow election electron element elephant
ember emerald emotion emphasis employee employer employment end energy engagement engine engineer enterprise
enthusiasm entrance entry envelope equipment equivalent era error essay evening event evidence example exception
exchange excitement existence expense experience experiment expert exposure expression extension extent facility fact
factor factory failure faith falcon family farm farmer fashion fate father fault fear feather feature feeding feeling
fellow female fence fern ferry fiber fiction fiddle fig film finding finger fish fist flag flame flight floor flower
fluid flute flux fog folk folklore food forest formation formula fossil fountain fox fraction frame freedom frequency
front fruit fun function fund funds future game garden garlic gas gate gazelle generation gesture gift ginger giraffe
glacier glass glory goal goblet gold goods goose gorilla government grade gradient gram granite grape graph grass
ground grounds growth guest guidance guitar guy habit hair half hall hammer hammock harbor harp haste hat hawk hazel
health hearing heart heat hedge height helium hen hero heron hickory hill hills hippo historian history holder hole
holiday home honey horizon horn hornet horse hospital host hotel hour humor hunting hut ice identity igloo illusion
image imitation impact importance impression impulse inch incident income indication indicator indigo individual
industry infantry influence inning insight instance instant instrument intensity intention interest interior interval
invention iodine iron island item ivory ivy jacket jaguar jasmine jazz job journey joy judgment jury justice kettle
key kid kind king kitchen kite kitten knee knowledge koala labor laboratory ladder lagoon lamp land landscape language
lantern laughter law lawn lawyer leader leadership leaf leg legend lemon lemur length leopard lesson letter level
lieutenant light lilac lily lime linguist lion list literature lizard loan lobster locket loss lot lotus luck lung
machine machinery magazine magnet magnitude maid majority management manager mango manner maple marble market
marketing marriage mass master material matter maturity meadow meal meaning means mechanism meeting melon member
membership memory mess message metal meteor method middle mile milk milligram mind mine minute missile mission mistake
mitten mixture mode model money monkey month mood moon moose morality morning moss mother motion motive mountain mouse
mouth movement movie mud muscle music musician mustard mystery myth name napkin nation nature necessity neck needle
neighbor nest network news newspaper noise north nothing notion novel nucleus nutmeg oak oasis oath object objection
objective obligation observer occasion occurrence office officer official oil olive onion onset opal operation
operator opinion opposition orange orbit orchard orchid origin otter outcome outlook owl owner oxidation oxygen oyster
paddle page pain painter painting pair panda panther paper papers parent parrot particle partner party passage past
path patient pattern payment peace peach peacock peanut pear pearl pebble pelican penguin pepper percent percentage
perception period personnel petitioner phase phenomenon philosophy phone photograph phrase piano picture piece pigeon
pillow pine pitcher plane planet planning plant plate player pleasure plenty plot plug plum pocket poem poet point
policy politician polynomial pond pony pool poppy population porch portion position possession pot potato powder power
prairie presence pressure prevention price pride principle procedure process producer product production professor
profile program progress projection proof property proportion proposal prospect protection protein provision puppet
purpose quality quantity quartz queen question quilt rabbit raccoon radiation radio raft railroad rain range rank rate
ratio raven ravine reaction reader reading realism reality rear reason recording recreation reduction reef reference
reflection regiment region relation relations relief religion research residence resistance resolution resource
respect response result rhythm ribbon rider right river road robin rock rocket role roof room rooster root rose route
routine row ruby rule rumor saddle safety saffron sail sale salesman saline salmon salt sample sandal sapphire satchel
scale scarf scene school science scope sea seal season secretary section security seed selection self sensation sense
sentence sentiment sequence series serum service services session settlement sewage shade shadow shape shark shear
sheep sheet shell shelter ship shirt shock shoe shore shot shoulder shovel sidewalk sight signal silence silk silver
sister site situation size sketch skill skin sky slipper slope smoke snake snow society soil solution son song sort
soul source south space sparrow specialist species spectator spectrum speech speed sphere spider spirit spoon sport
spot square squirrel stable staff stage staining stairs stall standard star statement station statue status steel stem
step steps stick stock stomach stone stork story stream street strength stress string strip structure student studio
style subject substance suburb success sugar suggestion suit sum summer sun supper supplies surface suspicion swan
symbol sympathy symptom system table tale talent tangent target task tax teacher teaching team teapot technique
technology telephone television tendency tension tent term text texture theme theorem theory thimble thistle thought
throat thunder thyroid tiger times tip tissue title toast toe tomato tone tool tooth top topaz tortoise town trade
tradition traffic training transition treatment tree trend trial trip trouble truck trumpet truth tsunami tube tulip
tunnel turnip turtle type umbrella uniform union unit unity universe university utopia vacation valley value values
variation variety vase vector vehicle vein velocity velvet version vertex veteran view viewpoint village violin vision
volcano volume voyage waffle wage wagon wall walnut walrus warning waterfall wave wavelength weakness wealth weather
week weekend weight west whale wheat whistle will willow wind windmill window wing winter wire wolf woman wood woods
word words worker writer writing yacht yard years zebra zipper
""")
_ADJECTIVES = _words("""
able absent absolute academic accurate active actual additional adequate aesthetic afraid alert alive amazing amber
ambiguous ample analytic ancient angry annual another anti anxious apparent aqueous artistic authentic automatic
autonomic available average awake aware awful azure bacterial bad basic beautiful best better big binomial biological
bitter blind blue bold bound brave brief bright brilliant broad broken bronze brown busy calm capable careful central
changing cheap cheerful chemical chief classic classical clear clever clinical cold commercial common comparable
competent complete complex conscious constant continuous convenient cool crazy creative crimson crisp critical
cultural curious curly dangerous dark deep defensive definite delicate delightful democratic dependent desirable
desperate different difficult dirty distant distinct domestic dominant doubtful downtown dramatic dull dusty each
early eastern easy economic effective efficient elaborate electoral electric electrical emotional empty enormous
entire equal essential eternal every evident exact excellent exciting existing expensive extensive external extra
extreme faint fair false familiar famous fantastic fast favorable few fewer fictional fierce final financial fine
finite firm flat fluffy formal former frantic frequent fresh friendly full funny furious general gentle genuine
geometric glad golden graceful grateful gray greater greatest green grim gross growing guilty handsome happy hard
healthy heavy helpful heroic hidden higher highest historical honest hot huge human humble ideal identical immediate
impossible impressive inadequate increasing incredible indirect industrial infectious initial inner innocent intense
internal jolly larger largest late latter leading left legal likely liquid literal literary lively living local
logical loose lost loud lovely low lower lucky main major maximum mechanical medical medieval mellow mental mere
mighty military minimal minimum minor missing misty moderate modern moral moving municipal muscular musical mysterious
narrow natural near neat necessary negative nervous neutral next nice nilpotent nimble noble normal northern nuclear
numerous obvious occasional odd older ominous opposite ordinary organic original outside overall painful pale parallel
particular peculiar perfect permanent persistent personal physical pink plain pleasant polished popular porous
positive potential powerful practical precious precise previous primary prime primitive principal prior private
probable productive profound prominent promising proper protective proud public pure pursuant quaint quick quiet
radical rapid rare raw ready real realistic reasonable recent regional regular relative relevant reliable remarkable
remote rich rough round rural rustic safe scarlet scientific secondary secret sensitive serious severe sharp shiny
short silent silky similar simple single skeletal sleepy slender slight slow smaller smart smooth snowy sober social
soft solid sore sorry southern special specific spicy startling steady straight strange striking strong structural
subjective subtle suburban successful sudden sufficient suitable sullen sunny superior supreme sure surprising sweet
swift swollen tall technical terrible thermal thick thin tidy tight tiny tough tragic tremendous true typical ultimate
unable uncertain uneasy unique universal unknown unlikely unusual upper useful usual utopian vague valuable various
vast velvety vigorous visible visual vivid vocational wandering warm weak weary western wet whole wide widespread wild
willing wise witty wonderful wooden working worse worth worthy wrong yellow young zesty
""")
_FIRST_NAMES = _words("""
Alice Amara Anders Anita Boris Bruno Carla Cedric Clara Daniel Diego Edith Elena Emil Esther Felix Fiona Gavin Greta
Hanna Hector Helen Igor Ingrid Isaac Jasper Joanna Julia Karim Laura Leon Lydia Marco Marta Miriam Nadia Naomi Nora
Oliver Olga Oscar Paula Pedro Petra Quentin Rachel Ravi Rosa Ruben Sarah Silvia Simon Stella Tariq Teresa Thomas
Ursula Victor Vera Walter Wanda Xavier Yara Yusuf Zelda
""")
_SURNAMES = _words("""
Abbott Archer Bailey Barnes Becker Bishop Brandt Brennan Carver Castillo Chandra Collins Conrad Dalton Delgado Duarte
Ellison Fabian Fisher Fletcher Garner Gibson Granger Hansen Harper Hoffman Holland Ibarra Ingram Jensen Keller Kumar
Lambert Larson Lindgren Lopez Mercer Meyer Monroe Moreno Murphy Nakamura Newton Novak Osborne Palmer Parker Quinn
Ramirez Reyes Romano Sanders Schmidt Silva Sutton Tanaka Thornton Vargas Vaughn Wagner Weaver Whitman Yates Zimmer
""")
_CITIES = _words("""
Accra Amsterdam Ankara Athens Auckland Baku Bangkok Barcelona Beirut Belgrade Bergen Berlin Bilbao Bogota Bordeaux
Boston Bremen Brisbane Brussels Bucharest Budapest Cairo Calgary Canberra Caracas Cardiff Casablanca Chicago Cologne
Copenhagen Cordoba Dakar Dallas Damascus Delhi Denver Dresden Dublin Durban Edinburgh Florence Frankfurt Geneva Genoa
Glasgow Granada Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta Kampala Kiev Kingston Krakow Kyoto Lagos Leeds
Leipzig Lima Lisbon Liverpool London Lusaka Lyon Madrid Malaga Manila Marseille Melbourne Miami Milan Montreal Moscow
Mumbai Munich Nairobi Naples Nice Osaka Oslo Ottawa Oxford Palermo Panama Paris Perth Porto Prague Quito Riga Rome
Rotterdam Santiago Sapporo Seattle Seoul Seville Shanghai Singapore Sofia Stockholm Stuttgart Sydney Tallinn Tbilisi
Tokyo Toronto Toulouse Trieste Tunis Turin Valencia Vancouver Venice Vienna Vilnius Warsaw York Zagreb Zurich
""")
