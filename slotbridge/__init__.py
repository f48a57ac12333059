"""What programs use of Slotbridge: `slotbridge.consumer` reads whole source transactions."""
