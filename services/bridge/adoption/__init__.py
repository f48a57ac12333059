"""Takes the slot and the topics over from a Debezium connector, and gives them back.

connector      its configuration -> our settings, or why not
lists          its lists of tables and columns as patterns
properties     files of Java's properties
unwrapped      its transformation ExtractNewRecordState as flat rows
forms          how the topics' records are written, and how ours would be
offsets        the offset that Kafka Connect has of it
slot_reader   what the slot decodes, without confirming anything
tails          the last records of the topics
told           what these tell of each key
overlap        the changes that the slot decodes again, without those that Kafka has
adoption       one Kafka transaction: what Kafka lacks of these, and the first progress record
release        the way back
"""
