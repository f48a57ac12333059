"""Takes the slot and the topics over from a Debezium connector, and gives them back.

connector             its configuration
translation           its configuration as our settings, or why not
converters            its converters as our formats and the registry
lists                 its lists of tables and columns as patterns
properties            files of Java's properties
flat_transformation   its transformation ExtractNewRecordState as flat rows
decoding              keys and values as documents: JSON, or Avro by its writer's schema
forms                 how the topics' records are written, and how ours would be
offsets               the offset that Kafka Connect has of it; connect_offsets: where
slot_reader           what the slot decodes, without confirming anything
tails                 the last records of the topics
last_records          what these tell of each key
overlap               the changes that the slot decodes again, without those that Kafka has
overlap_batches       these changes as events
registry_look         what the registry would say to our schemas
adoption              one Kafka transaction: what Kafka lacks of these, the first progress record
release               the way back
"""
