"""Words and relations of the generated text, from which `facts` draws.

A relation is one line: label | statement | question | kind of value. ``{n}`` stands for a name, ``{v}`` for the value.
This file contains none of the words of an evaluation's recall questions; a test compares the two.
"""

from __future__ import annotations

PEOPLE = (
    "Aiko Amara Anouk Arjun Astrid Ayla Bashir Benoit Birgit Bogdan Caio Camille Chidi Chiara Dagny Dilan Dmitri Ebba Eduardo "
    "Eleni Emre Farid Fatima Fergus Giulia Goran Haruto Hedda Hiroshi Ibrahim Ilse Imani Ines Ioana Ivo Jarek Jelena Joaquin "
    "Kaito Kamala Katarina Kofi Lars Leila Ling Lorenzo Magda Malik Marta Mateo Mei Milos Nadia Ngozi Niamh Olga Omar Pavel "
    "Priya Quentin Rahul Ravi Reza Rohan Sanjay Seda Signe Soren Svetlana Takumi Tariq Tomasz Ulla Vikram Wanda Xiomara Yara "
    "Yusuf Zainab Zoltan"
).split()
SURNAMES = (
    "Abara Almeida Bianchi Castellan Dvorak Eriksen Farkas Gonzaga Haddad Ibarra Jansen Kaya Kowalski Lindqvist Marchetti "
    "Nakamura Okafor Petrov Quispe Rossi Sato Tanaka Ueda Vasquez Weber Yilmaz Zhang"
).split()
WORDS: dict[str, tuple[str, ...]] = {
    "city": tuple(
        "Aarhus Bergen Bologna Brno Busan Cusco Dakar Fukuoka Gdansk Ghent Hanoi Izmir Kazan Krakow Lagos Lille Lima "
        "Malmo Mumbai Nantes Odessa Porto Quito Riga Seville Tampere Tbilisi Turin Utrecht Zagreb".split()
    ),
    "job": tuple(
        "accountant baker biologist carpenter chemist dentist editor electrician farmer fisher gardener geologist lawyer "
        "librarian mechanic midwife nurse painter pharmacist pilot plumber potter surveyor tailor teacher welder".split()
    ),
    "food": tuple(
        "almonds apricots barley beetroot cashews celery cherries dates dumplings fennel ginger kale mango millet "
        "mushrooms noodles oatmeal okra papaya pumpkin quinoa radishes rice spinach tofu turnips yoghurt".split()
    ),
    "animal": tuple(
        "badger beaver camel crane dolphin falcon ferret gecko heron ibex jackal koala lemur lynx magpie marmot otter owl "
        "panda pelican penguin raven salmon seal stork toad turtle vole walrus wombat yak zebra".split()
    ),
    "plant": tuple(
        "acacia aloe aspen bamboo birch borage clover cypress daffodil elm fern hazel heather iris jasmine juniper "
        "larch lavender lilac lotus maple mint moss myrtle oleander orchid poppy sage thistle tulip willow yew".split()
    ),
    "subject": tuple(
        "algebra anatomy astronomy botany ceramics economics ethics genetics geometry grammar history law logic mechanics "
        "optics philosophy phonetics physics robotics rhetoric statistics theology topology zoology".split()
    ),
    "sport": tuple(
        "archery badminton boxing canoeing cricket curling cycling fencing handball hockey judo karate polo rowing rugby "
        "sailing skating squash surfing swimming tennis wrestling".split()
    ),
    "state": tuple(
        "active archived blocked cancelled closed delayed delivered draft expired failed idle locked open paused pending "
        "queued rejected retired running shipped skipped stalled synced verified".split()
    ),
    "service": tuple(
        "auth billing cache catalog checkout crawler exporter gateway indexer ingest mailer metrics notifier planner proxy "
        "ranker renderer replica router scheduler search session storage tracker uploader worker".split()
    ),
}
SYLLABLES = (
    "ba be bri cha cu da del dra du fa fen fi ga gor gu ha hil jo ka kel ki lan lo lu ma mer mo na ni nor pa pel qua ra ren ro "
    "sa sel shi so ta tis to tra um va ven vi wen xi yo za zem zu"
).split()
FILLERS = (
    "The weather stayed mild for most of the week.",
    "Nobody had expected the meeting to take this long.",
    "Some of the older entries were checked a second time.",
    "A short break followed, and then the work went on.",
    "Please read everything carefully before you reply.",
    "This section was last edited by the night shift.",
    "Further details can be found in the appendix.",
    "The remaining points will be discussed next month.",
    "It is worth remembering that plans like these change often.",
    "Several visitors asked how the numbers had been collected.",
    "The process takes a few minutes and cannot be interrupted.",
    "All figures are preliminary and may be corrected later.",
    "Most of the readers will want to skip this part.",
    "After lunch the group walked back along the canal.",
    "The script was run twice with the same outcome.",
    "Comments are welcome until the end of the quarter.",
    "Dinner was late, and the train was later still.",
    "No other changes were made to the configuration.",
    "The old building has since been turned into a museum.",
    "If in doubt, ask the person who wrote the page.",
)
TITLES = (
    "Overview|Staff notes|Shift report|Inventory|Current settings|Release notes|Directory|Bookings|Measurements|Schedule|"
    "Records|Status page|Summary|Registry|Price sheet|Minutes|Export|Results|Travel plan|Deliveries|Field log|Appendix"
).split("|")

_ENGLISH = """
phone extension|The phone extension of {n} is {v}.|What is the phone extension of {n}?|digits4
badge|{n} wears badge {v}.|Which badge does {n} wear?|code
desk|{n} sits at desk {v}.|At which desk does {n} sit?|digits3
home town|{n} grew up in {v}.|Where did {n} grow up?|city
profession|{n} works as a {v}.|What does {n} do for a living?|job
harvest|This autumn {n} harvested {v}.|What did {n} harvest this autumn?|food
birthday|The birthday of {n} is on {v}.|When is the birthday of {n}?|date
locker|{n} keeps a coat in locker {v}.|Which locker does {n} use?|digits3
supervisor|{n} reports to {v}.|Whom does {n} report to?|person
score|In the final round {n} scored {v} points.|How many points did {n} score in the final round?|digits2
pet|At home {n} has a tame {v}.|Which animal does {n} have at home?|animal
seminar|This term {n} teaches {v}.|What does {n} teach this term?|subject
hobby|On Sundays {n} goes to {v}.|What does {n} do on Sundays?|sport
departure|The bus to {n} leaves at {v}.|When does the bus to {n} leave?|time
platform|Trains for {n} depart from platform {v}.|From which platform do trains for {n} depart?|digits2
price|One unit of {n} costs {v}.|How much does one unit of {n} cost?|money
stock|There are {v} units of {n} left.|How many units of {n} are left?|digits3
part number|Order {n} under part number {v}.|What is the part number of {n}?|code
port|The service {n} listens on port {v}.|Which port does {n} listen on?|digits4
version|{n} was upgraded to version {v}.|To which version was {n} upgraded?|version
address|The host {n} answers at {v}.|At which address does {n} answer?|ip
token|The token issued to {n} is {v}.|Which token was issued to {n}?|hex
status|The ticket {n} is now {v}.|What is the status of ticket {n}?|state
owner|The folder {n} belongs to {v}.|To whom does the folder {n} belong?|person
backend|Requests for {n} go to the {v} service.|Which service handles requests for {n}?|service
timeout|The timeout of {n} is {v} ms.|What timeout does {n} have?|digits4
temperature|Sensor {n} reads {v} degrees.|What does sensor {n} read?|decimal
weight|The parcel {n} weighs {v} kg.|How heavy is the parcel {n}?|decimal
distance|It is {v} km to {n}.|How far is it to {n}?|digits3
flower|In front of {n} grows a {v}.|What grows in front of {n}?|plant
mascot|The mascot of {n} is the {v}.|Which animal is the mascot of {n}?|animal
meaning|In their language, {n} means {v}.|What does {n} mean in their language?|animal
capital|The capital of {n} is called {v}.|What is the capital of {n} called?|name
founder|{n} was founded by {v}.|Who founded {n}?|person
nickname|Friends call {n} by the nickname {v}.|Which nickname do friends use for {n}?|name
password hint|The hint stored for {n} reads {v}.|Which hint is stored for {n}?|name
commit|The fix for {n} landed in commit {v}.|In which commit did the fix for {n} land?|hex
invoice|{n} still has to pay invoice {v}.|Which invoice does {n} still have to pay?|code
dose|Patients on {n} take {v} mg a day.|How many mg of {n} do patients take a day?|digits3
altitude|The camp at {n} lies {v} m above the sea.|How high does the camp at {n} lie?|digits4
year|{n} opened in {v}.|In which year did {n} open?|year
email|Write to {n} at {v}.|What is the email address of {n}?|email
"""
_GERMAN = """
Telefon|Die Durchwahl von {n} ist {v}.|Welche Durchwahl hat {n}?|digits4
Wohnort|{n} wohnt in {v}.|Wo wohnt {n}?|city
Preis|{n} kostet {v}.|Was kostet {n}?|money
Abfahrt|Der Zug nach {n} geht um {v}.|Wann geht der Zug nach {n}?|time
Kunde|Die Kundennummer von {n} lautet {v}.|Wie lautet die Kundennummer von {n}?|code
Termin|{n} hat einen Termin am {v}.|Wann hat {n} einen Termin?|date
Vertretung|{n} wird von {v} vertreten.|Wer vertritt {n}?|person
Punkte|{n} erreichte {v} Punkte.|Wie viele Punkte erreichte {n}?|digits2
"""
_FRENCH = """
poste|Le poste de {n} est le {v}.|Quel est le poste de {n} ?|digits4
ville|{n} habite à {v}.|Où habite {n} ?|city
prix|Le prix de {n} est de {v}.|Quel est le prix de {n} ?|money
horaire|Le car pour {n} part à {v}.|À quelle heure part le car pour {n} ?|time
dossier|Le dossier de {n} porte le numéro {v}.|Quel numéro porte le dossier de {n} ?|code
responsable|{n} travaille avec {v}.|Avec qui travaille {n} ?|person
stock|Il reste {v} pièces de {n}.|Combien de pièces de {n} reste-t-il ?|digits3
"""
_SPANISH = """
teléfono|La extensión de {n} es {v}.|¿Cuál es la extensión de {n}?|digits4
ciudad|{n} vive en {v}.|¿Dónde vive {n}?|city
precio|El precio de {n} es {v}.|¿Cuál es el precio de {n}?|money
salida|El tren a {n} sale a las {v}.|¿A qué hora sale el tren a {n}?|time
pedido|El pedido de {n} es {v}.|¿Cuál es el pedido de {n}?|code
jefe|{n} trabaja para {v}.|¿Para quién trabaja {n}?|person
puntos|{n} obtuvo {v} puntos.|¿Cuántos puntos obtuvo {n}?|digits2
"""
_PORTUGUESE = """
ramal|O ramal de {n} é {v}.|Qual é o ramal de {n}?|digits4
cidade|{n} mora em {v}.|Onde mora {n}?|city
preço|O preço de {n} é {v}.|Qual é o preço de {n}?|money
código|O código postal de {n} é {v}.|Qual é o código postal de {n}?|code
chefe|{n} responde a {v}.|A quem {n} responde?|person
"""
_CHINESE = """
分机|{n}的分机号是{v}。|{n}的分机号是多少?|digits4
价格|{n}的价格是{v}。|{n}的价格是多少?|money
城市|{n}住在{v}。|{n}住在哪里?|city
编号|{n}的编号是{v}。|{n}的编号是什么?|code
负责人|{n}的负责人是{v}。|{n}的负责人是谁?|person
"""


def _relations(lines: str) -> tuple[tuple[str, str, str, str], ...]:
    found = []
    for line in lines.strip().splitlines():
        label, statement, question, kind = line.split("|")
        found.append((label, statement, question, kind))
    return tuple(found)


# English is the most frequent language, because most templates around the relations are English.
LANGUAGES = tuple(map(_relations, (_ENGLISH, _GERMAN, _FRENCH, _SPANISH, _PORTUGUESE, _CHINESE)))
LANGUAGE_WEIGHTS = (12, 1, 1, 1, 1, 1)
