"""The texts that built-in prompts are made of. Plain prose and questions, written for this purpose."""

from __future__ import annotations

QUESTIONS = (
    "What is the difference between weather and climate?",
    "Name three uses of a lever in a kitchen.",
    "Why does bread rise, and what stops it?",
    "How would you explain compound interest to a child?",
    "Give me a packing list for two days in the hills.",
    "What makes some bridges hum in the wind?",
    "How do locks lift a boat uphill?",
    "Which plants grow well in a dark corner?",
)

FOLLOW_UPS = (
    "Please go on, and give one more example.",
    "What would somebody object to that, and what would you answer?",
    "Say the same again in a friendlier tone.",
    "Which part of this are you least sure of, and why?",
    "Now turn it into a short list of steps.",
    "How would that change if there were twice as much time?",
)

TASKS = (
    "Read the notes below and tell me, in your own words, what the people in them care about most.",
    "Read the notes below and write a letter to a friend about what you found surprising in them.",
    "Read the notes below and list every decision that somebody made, with the reason given for it.",
    "Read the notes below and continue them with three further paragraphs in the same tone.",
)

PUZZLES = (
    "Four people cross a bridge at night with one lamp; at most two may walk at once and the lamp must go "
    "with them. They need 1, 2, 7 and 10 minutes, and a pair walks at the pace of its slower member. Think "
    "step by step and find the least time in which all four are across, and prove that nothing faster exists.",
    "A gardener plants nine trees so that they stand in ten rows of three. Think step by step, describe where "
    "each tree stands, and check every row by naming its trees.",
    "You have twelve coins of equal look; one of them has another weight, lighter or heavier. Think step by "
    "step and find it with three weighings on a balance, covering every outcome.",
    "A number has six digits. When its last digit is moved to the front, the number becomes four times as "
    "large. Think step by step, find the smallest such number and verify it.",
)

NOTES = (
    "The mill stood where the valley narrowed, and whoever owned it owned the quarrels about water as well. "
    "In dry summers the farmers upstream opened their ditches at night, and in the morning the wheel turned "
    "as if it were asleep. The miller kept a notched stick in the pond and wrote the level on the door with "
    "chalk. When the argument came, and it came every August, he pointed at the door. Nobody liked the door, "
    "but nobody could say that it lied, and in the end they agreed to share the nights by the numbers on it.",
    "Her workshop had two clocks. One showed the time, the other had been stopped on purpose at the hour when "
    "the old boiler had burst. Apprentices asked about it on their first day and got the same answer: that a "
    "machine gives notice before it fails, and that the notice is always boring. A gasket weeps, a bearing "
    "runs warm, a pump needs one stroke more than last week. She made them write such things down in a book "
    "with squared paper. After a year most of them could hear a bearing before they could see it.",
    "The post bus left at ten past six, whether or not there was anybody to carry. Its driver said that a "
    "timetable is a promise made to people who are not there yet. In winter he carried bread and newspapers, "
    "in spring he carried seedlings, and once he carried a bell for the school, wrapped in a mattress, which "
    "rang at every bend all the same. When the road slid into the river in the wet year, he walked the route "
    "for eleven days with a rucksack, and set off at ten past six.",
    "We counted the birds on the estuary twice a month, at the lowest tide, from the same three stones. The "
    "counts did not agree with each other at first, because one of us counted pairs and another counted "
    "heads. It took a season to notice. Since then every sheet begins with a sentence about what is being "
    "counted and what is left out. The numbers have grown smaller, but they have become comparable, and a "
    "small number that can be compared is worth more than a large one that cannot.",
    "The bakery lost its oven on a Thursday. By Friday they had borrowed three small ones from neighbours, "
    "and each of them baked in its own way: one too hot at the back, one too cool at the door, one slow to "
    "recover after it had been opened. The loaves came out in three colours. Customers began to ask for a "
    "colour by name. When the new oven arrived in May it baked perfectly even loaves, and for several weeks "
    "people asked, with some regret, whether the dark ones would ever come back.",
    "A cable was to be laid across the lake, and the question was how much of it to order. The chart gave a "
    "depth of ninety metres, but the chart had been drawn by a man who rowed in summer only. They lowered a "
    "weight every fifty strokes and found a trench that nobody had known. The cable they ordered was a fifth "
    "longer than the plan, and the treasurer complained until the day it was laid, when eleven metres were "
    "left over on the drum. The drum is still there, as an argument for measuring.",
    "The library keeps a shelf for books that were returned with something in them. Train tickets are the "
    "most common, then pressed flowers, then shopping lists. One list says only: rope, candles, apologise. "
    "The librarian does not throw these things away, and she does not show them either, unless somebody comes "
    "back and can say what was written there. In thirty years that has happened four times, and one of those "
    "four was the person who had to apologise, who said that it had gone well.",
    "On the night shift they tested the signals in pairs, one man at the lever and one at the far end of the "
    "yard with a lantern. The rule was that the man with the lantern spoke first, so that nobody would hear "
    "what he expected to hear. It was a slow rule and it was kept for forty years. When the levers were "
    "replaced by buttons somebody proposed to drop it, since the panel now showed the state of every signal. "
    "The panel showed the state of the panel, said the oldest of them, and the rule stayed.",
    "The orchard had been planted by three generations who did not agree about anything. The grandfather "
    "wanted apples that would keep until March, the father wanted apples that would sell in September, the "
    "daughter wanted to know which trees would stand a late frost. She drew a map and coloured every tree by "
    "the day on which it blossomed. The late ones stood in the hollow, where frost collects, and the early "
    "ones on the slope. Nobody had planned that, or all three had, and the map hangs in the press house now.",
    "For the crossing they made a list of what could go wrong and who would notice it first. The cook would "
    "notice bad water, the boy would notice chafed rope because he climbed it for fun, the mate would notice "
    "weather. Then they asked what nobody would notice. It was quiet for a while. The tank of lamp oil, said "
    "the boy, because we only use it when the batteries are flat. They looked, and it was empty. The list got "
    "a second column, and the second column became the more important one.",
)

_WORD_LIST = (
    "amber bishop canvas dinner escape floral granite harvest island jungle kernel lantern marble narrow "
    "orange parcel quartz ribbon saddle timber upward velvet window yellow zigzag advice border candle dragon "
    "engine fabric guitar hammer insect jacket kitten ladder mirror needle oyster pencil quiver rocket shadow "
    "tunnel united vessel wallet yogurt acorn basket copper desert ember feather gallery hollow ivory jewel "
    "lemon meadow nectar olive pepper raisin silver thunder urchin violin winter almond beacon cactus dolphin "
    "echo fiddle garden hazel iceberg jasmine kayak locket magnet notebook onion paddle radish spiral trumpet "
    "umber village walnut barrel canyon eclipse fountain glacier horizon inlet lizard monsoon octopus puzzle "
    "rattle sailor temple uncle whistle"
)
WORDS = tuple(_WORD_LIST.split())
