"""The part of Slotbridge that programs import: `slotbridge.consumer` reads source transactions."""
