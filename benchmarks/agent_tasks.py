"""Thirty tools of an office assistant, rules that the system message states, and a hundred requests.

Every request says, or has in the rules, what the arguments are, so there is one right call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RULES = """You are the assistant of Halden Ltd. Call exactly one tool for each request. Rules:
- Project ids: website is WEB-4821, mobile app is APP-1177, warehouse is WHS-3090, newsletter is NWL-6654.
- Rooms: the big room is R-201, the small room is R-105, the lab is L-017.
- People: Ada is ada.holm@halden.example, Bo is bo.lind@halden.example, Cy is cy.moor@halden.example.
- Amounts are given in cents: 12 euros are 1200.
- Priorities: urgent is 1, normal is 3, whenever there is time is 5.
- Dates are written as YYYY-MM-DD; this year is 2026."""

S, I, B = "string", "integer", "boolean"  # noqa: E741


def _tool(name: str, description: str, **arguments: tuple[Any, ...]) -> dict[str, Any]:
    properties = {}
    for argument, (kind, meaning, *choices) in arguments.items():
        properties[argument] = {"type": kind, "description": meaning} | ({"enum": choices} if choices else {})
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("create_ticket", "Opens a ticket in the issue tracker of a project.",
          project=(S, "Id of the project."), title=(S, "What it is about."), priority=(I, "1 (urgent) to 5.")),
    _tool("close_ticket", "Closes a ticket.", ticket=(I, "Number of the ticket."),
          reason=(S, "Why.", "fixed", "duplicate", "wont_fix")),
    _tool("assign_ticket", "Gives a ticket to a person.", ticket=(I, "Number of the ticket."),
          email=(S, "Address of the person.")),
    _tool("search_tickets", "Finds tickets by words.", project=(S, "Id of the project."), words=(S, "What for.")),
    _tool("book_room", "Reserves a room.", room=(S, "Id of the room."), date=(S, "Day."), start=(S, "Time, HH:MM."),
          minutes=(I, "How long.")),
    _tool("cancel_booking", "Cancels a reservation.", booking=(S, "Its code.")),
    _tool("room_equipment", "Lists what is in a room.", room=(S, "Id of the room.")),
    _tool("send_email", "Sends an e-mail.", to=(S, "Address."), subject=(S, "Subject."), body=(S, "Text.")),
    _tool("find_email", "Searches the mailbox.", sender=(S, "Address of the sender."), words=(S, "What to look for.")),
    _tool("schedule_meeting", "Puts a meeting into the calendar of a person.", email=(S, "Address of the person."),
          date=(S, "Day."), start=(S, "Time, HH:MM."), topic=(S, "What it is about.")),
    _tool("list_meetings", "Shows the meetings of a person on one day.", email=(S, "Address."), date=(S, "Day.")),
    _tool("create_invoice", "Writes an invoice to a customer.", customer=(S, "Name of the customer."),
          amount=(I, "Amount in cents."), due=(S, "Day on which it is due.")),
    _tool("pay_invoice", "Pays an invoice of a supplier.", invoice=(S, "Its number."),
          account=(S, "What pays.", "main", "petty_cash")),
    _tool("refund", "Gives money back to a customer.", order=(I, "Number of the order."), amount=(I, "Cents.")),
    _tool("exchange_rate", "Tells the rate between two currencies.", base=(S, "3 letters."), quote=(S, "3 letters.")),
    _tool("stock_level", "Tells how many pieces of an article there are.", article=(S, "Its code.")),
    _tool("reorder", "Orders more of an article.", article=(S, "Its code."), pieces=(I, "How many.")),
    _tool("move_stock", "Moves pieces from one shelf to another.", article=(S, "Its code."), pieces=(I, "How many."),
          source=(S, "Shelf."), target=(S, "Shelf.")),
    _tool("track_parcel", "Tells where a parcel is.", parcel=(S, "Its number.")),
    _tool("weather_forecast", "Forecast for a city.", city=(S, "Name."), days=(I, "How many days, 1 to 7.")),
    _tool("translate", "Translates a text.", text=(S, "The text."), language=(S, "Target language, in English.")),
    _tool("set_reminder", "Reminds the user.", text=(S, "Of what."), date=(S, "Day."), time=(S, "Time, HH:MM.")),
    _tool("start_timer", "Starts a countdown.", seconds=(I, "How long."), label=(S, "Its name.")),
    _tool("deploy", "Deploys a version of a project.", project=(S, "Id of the project."), version=(S, "Version."),
          target=(S, "Where to.", "staging", "production")),
    _tool("rollback", "Goes back to the version before.", project=(S, "Id of the project."),
          target=(S, "Where.", "staging", "production")),
    _tool("read_log", "Reads the last lines of a log.", service=(S, "Name of the service."), lines=(I, "How many.")),
    _tool("restart_service", "Restarts a service.", service=(S, "Its name."), force=(B, "Without waiting.")),
    _tool("add_user", "Creates an account.", login=(S, "Login."), role=(S, "Rights.", "viewer", "editor", "admin")),
    _tool("remove_user", "Deletes an account.", login=(S, "Login name.")),
    _tool("query_sales", "Sums up sales of an article in a month.", article=(S, "Its code."), month=(S, "YYYY-MM.")),
]  # fmt: skip

WEB, APP, WHS, NWL = "WEB-4821", "APP-1177", "WHS-3090", "NWL-6654"
BIG, SMALL, LAB = "R-201", "R-105", "L-017"
ADA, BO, CY = (f"{name}@halden.example" for name in ("ada.holm", "bo.lind", "cy.moor"))

Call = tuple[str, Mapping[str, Any]]


def _call(name: str, **arguments: Any) -> Call:
    return name, arguments


REQUESTS: list[tuple[str, Call]] = [
    ("Open an urgent ticket for the website titled 'Login page is blank'.",
     _call("create_ticket", project=WEB, title="Login page is blank", priority=1)),
    ("Open a normal ticket for the warehouse titled 'Scanner beeps twice'.",
     _call("create_ticket", project=WHS, title="Scanner beeps twice", priority=3)),
    ("Open a ticket for the mobile app titled 'Dark icons', whenever there is time.",
     _call("create_ticket", project=APP, title="Dark icons", priority=5)),
    ("Open an urgent ticket for the newsletter titled 'Wrong footer'.",
     _call("create_ticket", project=NWL, title="Wrong footer", priority=1)),
    ("Close ticket 5512, it is fixed.", _call("close_ticket", ticket=5512, reason="fixed")),
    ("Close ticket 871 as a duplicate.", _call("close_ticket", ticket=871, reason="duplicate")),
    ("Ticket 3020 will not be fixed, close it.", _call("close_ticket", ticket=3020, reason="wont_fix")),
    ("Give ticket 4417 to Bo.", _call("assign_ticket", ticket=4417, email=BO)),
    ("Assign ticket 90 to Ada.", _call("assign_ticket", ticket=90, email=ADA)),
    ("Let Cy have ticket 1205.", _call("assign_ticket", ticket=1205, email=CY)),
    ("Search the tickets of the mobile app for 'crash'.", _call("search_tickets", project=APP, words="crash")),
    ("Find tickets of the newsletter about 'unsubscribe'.", _call("search_tickets", project=NWL, words="unsubscribe")),
    ("Look for 'timeout' in the tickets of the warehouse.", _call("search_tickets", project=WHS, words="timeout")),
    ("Find website tickets about 'cookies'.", _call("search_tickets", project=WEB, words="cookies")),
    ("Book the big room on May 4 at 09:30 for 45 minutes.",
     _call("book_room", room=BIG, date="2026-05-04", start="09:30", minutes=45)),
    ("Reserve the lab on June 12 at 14:00 for 90 minutes.",
     _call("book_room", room=LAB, date="2026-06-12", start="14:00", minutes=90)),
    ("Book the small room on March 2 at 08:00 for 30 minutes.",
     _call("book_room", room=SMALL, date="2026-03-02", start="08:00", minutes=30)),
    ("Reserve the big room on October 21 at 16:15 for 60 minutes.",
     _call("book_room", room=BIG, date="2026-10-21", start="16:15", minutes=60)),
    ("Cancel the booking K7-QX2.", _call("cancel_booking", booking="K7-QX2")),
    ("I no longer need my reservation M3-AA9, cancel it.", _call("cancel_booking", booking="M3-AA9")),
    ("Please cancel booking T1-0ZB.", _call("cancel_booking", booking="T1-0ZB")),
    ("What is in the lab?", _call("room_equipment", room=LAB)),
    ("What equipment does the small room have?", _call("room_equipment", room=SMALL)),
    ("List the equipment of the big room.", _call("room_equipment", room=BIG)),
    ("Write an e-mail to Ada with the subject 'Keys' and the text 'They are at the desk.'",
     _call("send_email", to=ADA, subject="Keys", body="They are at the desk.")),
    ("Send Cy an e-mail, subject 'Lunch', text 'See you at noon.'",
     _call("send_email", to=CY, subject="Lunch", body="See you at noon.")),
    ("E-mail Bo with subject 'Report' and body 'It is done.'",
     _call("send_email", to=BO, subject="Report", body="It is done.")),
    ("Find the e-mails from Bo about 'budget'.", _call("find_email", sender=BO, words="budget")),
    ("Search my mailbox for messages of Cy with 'visa'.", _call("find_email", sender=CY, words="visa")),
    ("Look for e-mails from Ada that mention 'contract'.", _call("find_email", sender=ADA, words="contract")),
    ("Schedule a meeting with Ada on April 9 at 11:00 about 'Hiring'.",
     _call("schedule_meeting", email=ADA, date="2026-04-09", start="11:00", topic="Hiring")),
    ("Put a meeting with Bo into the calendar: July 1, 10:30, topic 'Pricing'.",
     _call("schedule_meeting", email=BO, date="2026-07-01", start="10:30", topic="Pricing")),
    ("Arrange a meeting with Cy on September 15 at 13:00 about 'Audit'.",
     _call("schedule_meeting", email=CY, date="2026-09-15", start="13:00", topic="Audit")),
    ("Which meetings does Cy have on August 3?", _call("list_meetings", email=CY, date="2026-08-03")),
    ("Show Ada's meetings of December 18.", _call("list_meetings", email=ADA, date="2026-12-18")),
    ("List the meetings of Bo on February 27.", _call("list_meetings", email=BO, date="2026-02-27")),
    ("Write an invoice over 250 euros to Nordlicht, due on June 30.",
     _call("create_invoice", customer="Nordlicht", amount=25000, due="2026-06-30")),
    ("Create an invoice for Tarn & Co over 80 euros, due on May 15.",
     _call("create_invoice", customer="Tarn & Co", amount=8000, due="2026-05-15")),
    ("Invoice Velmora with 1200 euros, due on November 1.",
     _call("create_invoice", customer="Velmora", amount=120000, due="2026-11-01")),
    ("Invoice Osprey with 45 euros, due on March 31.",
     _call("create_invoice", customer="Osprey", amount=4500, due="2026-03-31")),
    ("Pay the invoice RE-7781 from the main account.", _call("pay_invoice", invoice="RE-7781", account="main")),
    ("Pay invoice 2026-0447 from petty cash.", _call("pay_invoice", invoice="2026-0447", account="petty_cash")),
    ("Settle the invoice LK-19 from the main account.", _call("pay_invoice", invoice="LK-19", account="main")),
    ("Refund 15 euros for order 66120.", _call("refund", order=66120, amount=1500)),
    ("Give the customer of order 70931 back 9 euros.", _call("refund", order=70931, amount=900)),
    ("Refund order 58004 with 120 euros.", _call("refund", order=58004, amount=12000)),
    ("What is the exchange rate from EUR to JPY?", _call("exchange_rate", base="EUR", quote="JPY")),
    ("Tell me the rate from USD to CHF.", _call("exchange_rate", base="USD", quote="CHF")),
    ("How does SEK convert to NOK right now? Look up the rate.", _call("exchange_rate", base="SEK", quote="NOK")),
    ("How many pieces of HX-200 are in stock?", _call("stock_level", article="HX-200")),
    ("What is the stock level of BOLT-M8?", _call("stock_level", article="BOLT-M8")),
    ("Do we still have PR-77? Check the stock.", _call("stock_level", article="PR-77")),
    ("Order 400 more pieces of HX-200.", _call("reorder", article="HX-200", pieces=400)),
    ("Reorder 25 pieces of LAMP-9.", _call("reorder", article="LAMP-9", pieces=25)),
    ("We need 1500 more of BOLT-M8, order them.", _call("reorder", article="BOLT-M8", pieces=1500)),
    ("Move 30 pieces of PR-77 from shelf A4 to shelf C1.",
     _call("move_stock", article="PR-77", pieces=30, source="A4", target="C1")),
    ("Move 12 pieces of LAMP-9 from shelf D2 to shelf B7.",
     _call("move_stock", article="LAMP-9", pieces=12, source="D2", target="B7")),
    ("Take 5 pieces of HX-200 from shelf E9 and put them on shelf A1.",
     _call("move_stock", article="HX-200", pieces=5, source="E9", target="A1")),
    ("Where is parcel 00340434?", _call("track_parcel", parcel="00340434")),
    ("Track the parcel JD0146.", _call("track_parcel", parcel="JD0146")),
    ("Has parcel ZX-88-12 arrived? Track it.", _call("track_parcel", parcel="ZX-88-12")),
    ("What will the weather be in Bergen for the next 3 days?", _call("weather_forecast", city="Bergen", days=3)),
    ("Give me the forecast for Lisbon for 7 days.", _call("weather_forecast", city="Lisbon", days=7)),
    ("Forecast for Graz, 2 days, please.", _call("weather_forecast", city="Graz", days=2)),
    ("Translate 'Good morning' into Finnish.", _call("translate", text="Good morning", language="Finnish")),
    ("Translate 'Where is the station?' into Polish.",
     _call("translate", text="Where is the station?", language="Polish")),
    ("I need 'Mind the gap' in Dutch; translate it.", _call("translate", text="Mind the gap", language="Dutch")),
    ("Remind me of 'Water the plants' on May 8 at 07:45.",
     _call("set_reminder", text="Water the plants", date="2026-05-08", time="07:45")),
    ("Set a reminder 'Call the bank' for January 30 at 15:00.",
     _call("set_reminder", text="Call the bank", date="2026-01-30", time="15:00")),
    ("Remind me on April 22 at 09:00 of 'Renew passport'.",
     _call("set_reminder", text="Renew passport", date="2026-04-22", time="09:00")),
    ("Start a timer of 300 seconds called 'tea'.", _call("start_timer", seconds=300, label="tea")),
    ("Start a countdown of 90 seconds named 'plank'.", _call("start_timer", seconds=90, label="plank")),
    ("Set a timer named 'eggs' for 420 seconds.", _call("start_timer", seconds=420, label="eggs")),
    ("Deploy version 2.4.1 of the website to production.",
     _call("deploy", project=WEB, version="2.4.1", target="production")),
    ("Deploy version 0.9.0 of the mobile app to staging.",
     _call("deploy", project=APP, version="0.9.0", target="staging")),
    ("Deploy version 3.0.2 of the newsletter to production.",
     _call("deploy", project=NWL, version="3.0.2", target="production")),
    ("Put version 1.12.0 of the warehouse on staging.",
     _call("deploy", project=WHS, version="1.12.0", target="staging")),
    ("Roll back the website on production.", _call("rollback", project=WEB, target="production")),
    ("Roll the mobile app back on staging.", _call("rollback", project=APP, target="staging")),
    ("Go back to the version before of the warehouse on production.",
     _call("rollback", project=WHS, target="production")),
    ("Roll back the newsletter on staging.", _call("rollback", project=NWL, target="staging")),
    ("Read the last 50 lines of the log of the service checkout.", _call("read_log", service="checkout", lines=50)),
    ("Show me 200 lines of the log of gateway.", _call("read_log", service="gateway", lines=200)),
    ("Read 10 lines of the mailer's log.", _call("read_log", service="mailer", lines=10)),
    ("Restart the service gateway by force.", _call("restart_service", service="gateway", force=True)),
    ("Restart checkout, but not by force.", _call("restart_service", service="checkout", force=False)),
    ("Restart the service indexer by force, without waiting.", _call("restart_service", service="indexer", force=True)),
    ("Create an account with the login jpeters as an editor.", _call("add_user", login="jpeters", role="editor")),
    ("Add the user mkhan as an admin.", _call("add_user", login="mkhan", role="admin")),
    ("Add a viewer with the login tlund.", _call("add_user", login="tlund", role="viewer")),
    ("Delete the account of rgomez.", _call("remove_user", login="rgomez")),
    ("Remove the user oldadmin2.", _call("remove_user", login="oldadmin2")),
    ("The login kvogel must go, delete it.", _call("remove_user", login="kvogel")),
    ("What were the sales of HX-200 in March 2026?", _call("query_sales", article="HX-200", month="2026-03")),
    ("Sum up the sales of LAMP-9 in November 2025.", _call("query_sales", article="LAMP-9", month="2025-11")),
    ("How much of PR-77 did we sell in July 2026?", _call("query_sales", article="PR-77", month="2026-07")),
    ("Refund 33 euros for order 41277.", _call("refund", order=41277, amount=3300)),
    ("Open a normal ticket for the website titled 'Slow search'.",
     _call("create_ticket", project=WEB, title="Slow search", priority=3)),
    ("Book the lab on December 1 at 10:00 for 120 minutes.",
     _call("book_room", room=LAB, date="2026-12-01", start="10:00", minutes=120)),
    ("Give ticket 2768 to Cy.", _call("assign_ticket", ticket=2768, email=CY)),
]  # fmt: skip


def is_right(expected: Call, name: str, arguments: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether the tool is the right one, and whether its arguments are, too; case and final periods do not matter."""
    is_tool = name == expected[0]
    return is_tool, is_tool and _plain(arguments) == _plain(expected[1])


def _plain(arguments: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value).strip().rstrip(".").casefold() for key, value in arguments.items()}
