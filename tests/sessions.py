"""Feeding live sessions in tests."""

from stam.scene.sensor import ImageSensor


def sensor_of(agent, image) -> ImageSensor:
    return ImageSensor(image, agent.grid)


def feed(session, sensor, count) -> list:
    return [session.observe(sensor.sense(session.location)) for _ in range(count)]
